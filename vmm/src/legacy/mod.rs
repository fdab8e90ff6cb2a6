//! Legacy devices of a PC, on I/O ports: the serial console, clocks, power-off and reset.
pub(crate) mod i8042;
pub(crate) mod pm_timer;
pub(crate) mod power;
pub(crate) mod rtc;
pub(crate) mod serial;
