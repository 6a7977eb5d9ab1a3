"""What is known from before: results by key, other repositories, directories shared between builds."""
