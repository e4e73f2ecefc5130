"""Sources of examples, one file each, and the pipeline that turns them into batches."""
