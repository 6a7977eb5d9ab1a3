"""What a build tells: events, and what is made of them for people and for CI."""
