"""Files of requests: `jaxinfer batch`, over the endpoints of the server, without a socket."""
