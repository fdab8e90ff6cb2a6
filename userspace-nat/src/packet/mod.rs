//! Reading and building packets.
pub mod checksum;
