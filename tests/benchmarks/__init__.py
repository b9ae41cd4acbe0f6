"""What locks cost, beside what they could cost. Figures for people: nothing here judges by time."""
