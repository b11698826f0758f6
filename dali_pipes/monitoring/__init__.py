"""What a loader measures, and how it is shown. No torch."""
