"""What comes back from the updates of many simulated federations: the tables and plots of docs/privacy.md."""
