"""The dashboard at ``/ui``: pages made by the server; a browser is given the API key once."""
