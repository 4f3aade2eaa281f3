"""What a run writes down as it goes, and what another run follows: decisions and scores."""
