"""Several hosts: Ray Serve starts one whole engine on each and routes requests by their media."""
