"""Sources of examples, one file each, and the pipeline that batches them."""
