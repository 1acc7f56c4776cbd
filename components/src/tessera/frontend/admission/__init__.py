"""How much work the frontend admits at a time, and how much one API key may use per minute."""
