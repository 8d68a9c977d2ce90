"""Work that is handed out to processes which come and go: who has what, and what is done."""
