"""The run report: workdir/report.html, one file that opens from disk, written while a run goes on.

`writer` keeps it, `groups` says what happened to a prompt, `pictures` and `curves` bring the rest,
`page` puts all of it into the HTML, CSS and scripts that lie beside these modules.
"""
