"""The commit of a clone is git's, that of an image is what the image was built with."""

from care_jax.run import versions


def test_an_image_names_the_commit_it_was_built_with(monkeypatch, tmp_path):
    monkeypatch.setenv("CARE_JAX_COMMIT", "abc12345+")
    assert versions.versions()["commit"] != "abc12345+"  # this is a clone
    monkeypatch.setattr(versions, "_ROOT", tmp_path)
    assert versions.versions()["commit"] == "abc12345+"
    monkeypatch.delenv("CARE_JAX_COMMIT")
    assert "commit" not in versions.versions()
