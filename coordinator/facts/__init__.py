"""What every view shows: functions from the database and the running services to plain values. Without torch, HTTP and HTML."""
