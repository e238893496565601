"""Tables of rows: Arrow, pandas, parquet, csv, json, streaming shards."""
