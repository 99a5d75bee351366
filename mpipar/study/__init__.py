"""What helps to understand a step: its schedules timed and drawn, its barriers explained."""
