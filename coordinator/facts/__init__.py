"""Facts for all views: functions that read the database and running services and return plain values. No torch, HTTP or HTML."""
