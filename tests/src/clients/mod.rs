//! Clients, to be called inside a guest: `guest.run(|| tcp::connect_close(address, timeout))`.

pub mod tcp;
