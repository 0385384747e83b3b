"""`fedcg doctor`: problems of this device, with remedies."""
