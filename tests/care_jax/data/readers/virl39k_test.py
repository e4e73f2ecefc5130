"""ViRL39K: parquet and JSON lines, images in a folder or in their archive, answers unboxed."""

import shutil

import pyarrow as pa
import pytest

from care_jax.batch import Unusable
from care_jax.data.readers import virl39k
from care_jax.prompts.images import encoded, fingerprint, image_size, open_image

A, B, GONE = "images/a.png", "images/b.png", "images/gone.png"
ROWS = [
    {"question": "<image>Find the angle.", "answer": "\\boxed{17^\\circ}", "image": [A]},
    {"question": "Compare.", "answer": "\\boxed{\\frac{1}{2}}", "image": [A, B]},
    {"question": "<image>", "answer": "\\boxed{}", "image": [A]},
    {"question": "<image><image>?", "answer": "\\boxed{C}", "image": [A]},
    {"question": "No picture", "answer": "\\boxed{C}", "image": []},
    {"question": "<image>gone", "answer": "\\boxed{C}", "image": [GONE]},
    {"question": "<image>two", "answer": "\\boxed{1} or \\boxed{2}", "image": [A]},
]
TYPES = {
    "question": pa.string(),
    "answer": pa.string(),
    "PassRate_32BTrained": pa.float64(),
    "PassRate_7BBase": pa.float64(),
    "category": pa.string(),
    "source": pa.string(),
    "qid": pa.string(),
    "image": pa.list_(pa.string()),
}


@pytest.fixture(params=["parquet", "jsonl"])
def release(request, tmp_path, write_parquet, write_json, picture):
    folder = tmp_path / "hub"
    rows = [
        {"PassRate_7BBase": 0.5, "category": "(GradeSchool) Math", "qid": f"Q-{i}", **row}
        for i, row in enumerate(ROWS)
    ]
    if request.param == "parquet":
        write_parquet(folder / "39Krelease.parquet", rows, TYPES)
    else:
        write_json(folder / "39Krelease.jsonl", rows)
    (folder / "images").mkdir()
    for name in "ab":
        (folder / "images" / f"{name}.png").write_bytes(picture(ord(name)))
    return folder


def test_answers_leave_their_boxes_and_lost_placeholders_come_back(release):
    rows = virl39k.open_rows(str(release), images="")
    assert len(rows) == len(ROWS)
    assert (rows[0].answer, rows[0].id, rows[0].repair) == ("17^\\circ", "Q-0", "")
    assert rows[1].answer == "\\frac{1}{2}"
    assert rows[1].question == "<image><image>Compare."
    assert rows[1].repair == "placeholder put in front"
    assert [image.name for image in rows[1].images] == ["a.png", "b.png"]
    assert open_image(rows[1].images[1]).size == (96, 64)
    assert rows[6].answer == "\\boxed{1} or \\boxed{2}"


@pytest.mark.parametrize(
    ("row", "reason"),
    [(2, "no answer"), (3, "images and placeholders differ in number"), (4, "no image")],
)
def test_bad_rows_are_unusable(release, row, reason):
    with pytest.raises(Unusable, match=reason):
        _ = virl39k.open_rows(str(release), images="")[row]


def test_images_may_lie_elsewhere(release):
    (release / "images").rename(release.parent / "images")
    rows = virl39k.open_rows(str(release), images=str(release.parent))
    assert open_image(rows[0].images[0]).size == (96, 64)
    with pytest.raises(Unusable, match="image missing"):
        open_image(rows[5].images[0])


@pytest.mark.parametrize("images", ["", "images.zip"])
def test_images_may_stay_in_their_archive(release, images):
    before = virl39k.open_rows(str(release), images="")[1].images
    files = [encoded(image) for image in before]
    fingerprints = [fingerprint(image) for image in before]
    shutil.make_archive(str(release / "images"), "zip", release, "images")
    shutil.rmtree(release / "images")
    rows = virl39k.open_rows(str(release), images=images and str(release / images))
    packed = rows[1].images
    assert [image.name for image in packed] == ["a.png", "b.png"]
    assert [encoded(image) for image in packed] == files
    assert [fingerprint(image) for image in packed] == fingerprints
    assert image_size(packed[0]) == (96, 64)
    with pytest.raises(Unusable, match="image missing"):
        open_image(rows[5].images[0])


def test_a_broken_archive_is_named(release):
    shutil.rmtree(release / "images")
    (release / "images.zip").write_bytes(b"half of it")
    with pytest.raises(ValueError, match=r"images\.zip is not a complete archive .*download it"):
        virl39k.open_rows(str(release), images="")


def test_a_broken_picture_in_the_archive_is_unusable(release):
    shutil.make_archive(str(release / "images"), "zip", release, "images")
    shutil.rmtree(release / "images")
    archive = release / "images.zip"
    whole = archive.read_bytes()
    start = whole.index(b"images/a.png") + 200
    archive.write_bytes(whole[:start] + bytes(64) + whole[start + 64 :])
    rows = virl39k.open_rows(str(release), images="")
    with pytest.raises(Unusable, match="image unreadable or truncated"):
        open_image(rows[0].images[0])
