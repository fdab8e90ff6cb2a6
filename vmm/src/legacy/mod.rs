//! A PC's few old devices, on I/O ports: the serial console, clocks, and the ways out.
pub(crate) mod i8042;
pub(crate) mod pm_timer;
pub(crate) mod power;
pub(crate) mod rtc;
pub(crate) mod serial;
