"""The run report: workdir/report.html, one file that opens from disk, updated during the run.

`writer` maintains the file, `groups` describes the rollouts of a prompt, `pictures` and `curves`
supply images and metrics, and `page` inserts all of it into the HTML, CSS and scripts in this
folder.
"""
