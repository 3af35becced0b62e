"""Search orders for the costs at hand: play them by simulated time, then move computations while that shortens them."""
