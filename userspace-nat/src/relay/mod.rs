//! Relays: connections the engine terminates.
