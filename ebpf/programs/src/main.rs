//! Entry points of slipgate's BPF programs. Their decisions are in [`slipgate_abi::datapath`].
//!
//! | program | hook | action |
//! | --- | --- | --- |
//! | [`guest_egress`] | TC ingress of a guest's TAP | translates established flows, hands the rest to the engine |
//! | [`uplink_ingress`] | TC ingress of an uplink with L2 header | translates established flows, lets the rest pass |
//! | [`uplink_ingress_l3`] | TC ingress of an uplink without L2 header | as above |
//! | [`guest_shut`] | TC ingress of a guest's TAP, after `guest_egress` | drops every frame: it arrives only if `guest_egress` was detached |
//! | [`engine_port`] | TC ingress of the engine's own TAP | executes the command in the header of the engine's frames |
//! | [`pacer`] | TC ingress of the pacing device's far end | sends frames on that the queue has let go |
//! | [`guard`] | XDP of a guest's TAP | drops frames before the kernel makes an skb |
//! | [`guest_egress6`], [`uplink_ingress6`], [`uplink_ingress6_l3`], [`engine_port6`] | a tail call of the program without the 6 | as that one, for IPv6 |
//!
//! Invariants: programs admit no flow (only `engine_port` and `engine_port6` insert into `FLOWS` and
//! `FLOWS6`, what the engine has decided and orders); a packet is counted once; nothing
//! from L3 up is modified before it is certain that the packet stays in the kernel.
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
    Program6, engine_port, guest_egress, guest_shut, pacer, packet::ETHERNET_LEN, uplink_ingress,
};

use crate::skb::Skb;

/// Processes frames from a guest.
#[classifier]
pub fn guest_egress(ctx: TcContext) -> i32 {
    guest_egress::run(Skb::new(&ctx))
}

/// Fallback: drops every frame from a guest if `guest_egress` was detached.
#[classifier]
pub fn guest_shut(ctx: TcContext) -> i32 {
    guest_shut::run(Skb::new(&ctx))
}

/// Processes packets from the world, on a device with an Ethernet header.
#[classifier]
pub fn uplink_ingress(ctx: TcContext) -> i32 {
    uplink_ingress::run::<_, ETHERNET_LEN>(Skb::new(&ctx))
}

/// Processes packets from the world, on a device whose packets start with the IP header (tun,
/// WireGuard).
#[classifier]
pub fn uplink_ingress_l3(ctx: TcContext) -> i32 {
    uplink_ingress::run::<_, 0>(Skb::new(&ctx))
}

/// Processes frames from the engine.
#[classifier]
pub fn engine_port(ctx: TcContext) -> i32 {
    engine_port::run(Skb::new(&ctx))
}

/// Processes IPv6 frames from a guest.
#[classifier]
pub fn guest_egress6(ctx: TcContext) -> i32 {
    Program6::GuestEgress.run(Skb::new(&ctx))
}

/// Processes IPv6 packets from the world, on a device with an Ethernet header.
#[classifier]
pub fn uplink_ingress6(ctx: TcContext) -> i32 {
    Program6::UplinkIngress.run(Skb::new(&ctx))
}

/// Processes IPv6 packets from the world, on a device without L2 header.
#[classifier]
pub fn uplink_ingress6_l3(ctx: TcContext) -> i32 {
    Program6::UplinkIngressL3.run(Skb::new(&ctx))
}

/// Processes IPv6 frames from the engine.
#[classifier]
pub fn engine_port6(ctx: TcContext) -> i32 {
    Program6::EnginePort.run(Skb::new(&ctx))
}

/// Sends frames on that the pacing device has let go.
#[classifier]
pub fn pacer(ctx: TcContext) -> i32 {
    pacer::run(Skb::new(&ctx))
}

/// Filters frames from a guest before the kernel makes an skb.
#[xdp]
pub fn guard(ctx: XdpContext) -> u32 {
    guard::run(&ctx)
}

/// License in the form that the kernel reads. Most helpers are available to GPL-compatible programs
/// only; the sources are dual-licensed.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
pub static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
