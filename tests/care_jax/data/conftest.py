"""Small files in the formats of the releases."""

from release_files import chartqa_parquet, geometry3k_parquet, write_json, write_parquet

__all__ = ["chartqa_parquet", "geometry3k_parquet", "write_json", "write_parquet"]
