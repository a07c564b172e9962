"""The device's side: programs that the runner compiles and launches, their shapes and the layout of their inputs."""
