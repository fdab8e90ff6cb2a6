//! The BPF programs of slipgate: entry points. What they decide is [`slipgate_abi::datapath`].
//!
//! | program | hook | what it does |
//! | --- | --- | --- |
//! | [`guest_egress`] | TC ingress of a guest's TAP | translates established flows, hands the rest to the engine |
//! | [`uplink_ingress`] | TC ingress of an uplink with L2 header | translates established flows, lets the rest pass |
//! | [`uplink_ingress_l3`] | TC ingress of an uplink without | as above |
//! | [`guest_shut`] | TC ingress of a guest's TAP, behind `guest_egress` | drops all: what comes here came by no program |
//! | [`engine_port`] | TC ingress of the engine's own TAP | does with the engine's frames what their header says |
//! | [`guard`] | XDP of a guest's TAP | drops early |
//!
//! Laws that bind every line here: nothing is admitted (no program inserts into a map), a packet
//! is counted once, and nothing from L3 up is modified before it is sure that the packet stays in
//! the kernel.
#![no_std]
#![no_main]

mod drops;
mod guard;
mod lookup;
mod maps;
mod skb;

use aya_ebpf::{
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};

use slipgate_abi::datapath::{
    engine_port, guest_egress, guest_shut, packet::ETHERNET_LEN, uplink_ingress,
};

use crate::skb::Skb;

/// From a guest.
#[classifier]
pub fn guest_egress(ctx: TcContext) -> i32 {
    guest_egress::run(Skb::new(&ctx))
}

/// From a guest whose TAP has lost the program above.
#[classifier]
pub fn guest_shut(ctx: TcContext) -> i32 {
    guest_shut::run(Skb::new(&ctx))
}

/// From the world, on a device with an Ethernet header.
#[classifier]
pub fn uplink_ingress(ctx: TcContext) -> i32 {
    uplink_ingress::run::<_, ETHERNET_LEN>(Skb::new(&ctx))
}

/// From the world, on a device whose packets start with the IP header (tun, WireGuard).
#[classifier]
pub fn uplink_ingress_l3(ctx: TcContext) -> i32 {
    uplink_ingress::run::<_, 0>(Skb::new(&ctx))
}

/// From the engine.
#[classifier]
pub fn engine_port(ctx: TcContext) -> i32 {
    engine_port::run(Skb::new(&ctx))
}

/// From a guest, before the kernel makes an skb.
#[xdp]
pub fn guard(ctx: XdpContext) -> u32 {
    guard::run(&ctx)
}

/// Most helpers are for GPL-compatible programs only; the sources are ours to license.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
pub static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
