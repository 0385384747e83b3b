"""The loop that joins the other rooms."""
