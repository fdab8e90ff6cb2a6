//! `flood`: UDP frames as fast as the device takes them. Each begins with its number, big-endian.

use core::num::NonZeroU16;

use alloc::{vec, vec::Vec};
use smoltcp::{iface::SocketHandle, phy::PacketMeta, socket::udp};

use super::{Failure, Outcome, Plan};
use crate::{
    command::Workload,
    net::{Stack, Turn},
    platform::{Nic, Platform},
};

/// Length of the Ethernet header, bytes.
const ETHERNET: usize = 14;
/// Length of the number at the start of each datagram, bytes.
const NUMBER: usize = 8;
/// Capacity of a socket's queue, frames.
const QUEUE_FRAMES: usize = 128;
/// Number of frames drawn from the remaining work at a time.
const DRAW: u64 = 64;

/// Returns the length of the IP and UDP headers of a flood, bytes.
fn headers(plan: &Plan) -> usize {
    let ip = if plan.server.is_ipv4() { 20 } else { 40 };
    ip + 8
}

/// Returns the length of a frame, bytes with the Ethernet header. By IPv6 the smallest is longer.
pub(super) fn frame_bytes(plan: &Plan) -> u32 {
    let Workload::Flood { frame_bytes, .. } = plan.workload else {
        return 0;
    };
    frame_bytes.max((ETHERNET + headers(plan) + NUMBER) as u32)
}

pub(super) fn work<P: Platform, N: Nic>(plan: &Plan, stack: &mut Stack<'_, P, N>) -> Outcome {
    let mut outcome = Outcome::default();
    let payload_bytes = frame_bytes(plan) as usize - ETHERNET - headers(plan);
    let segment_bytes = stack.mtu() - headers(plan);
    let share = plan.share(stack.cpu);
    // smoltcp drops an IPv6 packet that is larger than the MTU, also one to be cut.
    let can_cut = plan.server.is_ipv4() && stack.device.nic.can_segment_udp();
    if payload_bytes > segment_bytes && !can_cut {
        if stack.cpu == 0 {
            outcome.fail_many(Failure::Unable, plan.draw(u64::MAX));
            outcome.note = Some(match plan.server.is_ipv4() {
                true => "the device can't cut UDP frames (USO)".into(),
                false => "the stack can't have IPv6 frames cut".into(),
            });
        }
        return outcome;
    }
    let mut meta = PacketMeta::default();
    if payload_bytes > segment_bytes {
        meta.segmentation_offload_size = NonZeroU16::new(segment_bytes as u16);
    }
    let to = udp::UdpMetadata {
        endpoint: plan.server.into(),
        local_address: None,
        meta,
    };
    let mut senders: Vec<(SocketHandle, u16)> = Vec::with_capacity(share);
    for _ in 0..share {
        let now_ns = stack.now_ns();
        match stack.ports.take(now_ns) {
            Some(port) => senders.push((stack.sockets.add(socket(port, payload_bytes)), port)),
            None => outcome.port_waits += 1,
        }
    }
    let mut number = (stack.cpu as u64) << 32;
    let mut drawn = 0;
    stack.drive(|stack| {
        let mut queued = 0;
        for (handle, _) in &senders {
            let socket = stack.sockets.get_mut::<udp::Socket>(*handle);
            loop {
                if drawn == 0 {
                    drawn = plan.draw(DRAW);
                }
                if drawn == 0 || !socket.can_send() {
                    break;
                }
                let Ok(payload) = socket.send(payload_bytes, to) else {
                    break;
                };
                payload[..NUMBER].copy_from_slice(&number.to_be_bytes());
                number += 1;
                drawn -= 1;
                outcome.done += 1;
            }
            queued += socket.send_queue();
            // The answers of an echo server are discarded.
            while socket.can_recv() {
                let _ = socket.recv();
            }
        }
        match (queued, drawn) {
            (0, 0) => Turn::Done(()),
            _ => Turn::Worked,
        }
    });
    outcome.ended_ns = stack.now_ns();
    outcome.bytes = outcome.done * payload_bytes as u64;
    for (handle, port) in senders {
        stack.sockets.remove(handle);
        stack.ports.give_back(port, 0);
    }
    outcome
}

fn socket(port: u16, payload_bytes: usize) -> udp::Socket<'static> {
    let buffer = |frames: usize| {
        let meta = vec![udp::PacketMetadata::EMPTY; frames];
        udp::PacketBuffer::new(meta, vec![0; frames * payload_bytes])
    };
    let mut socket = udp::Socket::new(buffer(4), buffer(QUEUE_FRAMES));
    // It is not bound yet, and the port is not 0.
    let _ = socket.bind(port);
    socket
}
