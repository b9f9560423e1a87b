"""What things cost: flops and bytes as formulas, the machine's speeds, and the ways that are chosen by them."""
