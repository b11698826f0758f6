"""What any program needs: threads, ranks, locks, the user's cache folder, progress bars and messages."""
