//! A PC's few old devices, on I/O ports: the serial console, and the ways out.
pub(crate) mod i8042;
pub(crate) mod power;
pub(crate) mod serial;
