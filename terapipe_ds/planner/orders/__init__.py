"""Orders found for the costs at hand: played by simulated time, then moved while that makes them shorter."""
