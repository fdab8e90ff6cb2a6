//! The engine over the in-memory kernel.
mod admission;
mod books;
mod carried;
mod changes;
mod ends;
mod errors;
mod filtering;
mod inspected;
mod loopback;
mod names;
mod properties;
mod records;
mod reload;
mod rig;
mod shares;
mod speed;
mod survival;
