"""Whether two written answers mean the same, kind by kind."""
