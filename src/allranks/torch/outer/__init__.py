"""What learners that train apart for some steps do with their weights when they meet."""
