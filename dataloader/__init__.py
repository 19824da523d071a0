"""dataloader: a job farm for long, CPU-heavy ETL work on PostgreSQL."""
