//! Network testbed.
#![cfg(target_os = "linux")]

pub mod accounting;
pub mod baseline;
pub mod clients;
pub mod dhcp;
pub mod error;
pub mod ethtool;
pub mod frame;
pub mod guest;
pub mod impairment;
pub mod netns;
mod owner;
pub mod pattern;
pub mod pcap;
pub mod pump;
pub mod servers;
pub mod streams;
pub mod tap;
pub mod world;
