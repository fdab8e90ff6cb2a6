//! Driver of the virtio socket device (virtio 1.2, 5.10): packets, polled, on one CPU.
use alloc::vec::Vec;

use super::{
    DeviceError,
    dma::Dma,
    ring::{Ring, Segment, feature::EVENT_IDX},
    transport::{Doorbell, NO_VECTOR, ResetFirst, Transport},
};
use crate::pci::Registers;

/// PCI vendor and device id of a virtio socket device.
pub const VSOCK: (u16, u16) = (0x1AF4, 0x1053);
/// Address of the host.
pub const HOST_CID: u64 = 2;
/// Longest data of a packet that is sent, bytes.
pub const PACKET_BYTES: usize = 64 << 10;

/// Operations of vsock packets (virtio 5.10.6).
pub mod operation {
    /// Asks for a connection.
    pub const REQUEST: u16 = 1;
    /// Accepts a requested connection.
    pub const RESPONSE: u16 = 2;
    /// Refuses or ends a connection.
    pub const RST: u16 = 3;
    /// Says that its sender receives or sends no more.
    pub const SHUTDOWN: u16 = 4;
    /// Carries data of a stream.
    pub const RW: u16 = 5;
    /// Says how much the sender's buffer has forwarded.
    pub const CREDIT_UPDATE: u16 = 6;
    /// Asks for such a packet.
    pub const CREDIT_REQUEST: u16 = 7;
}

const STREAM: u16 = 1;
const HEADER_BYTES: usize = 44;
/// Number and length of the buffers for received packets.
const BUFFERS: u16 = 64;
const BUFFER_BYTES: usize = 4096;
/// Place of the sent packet, behind the buffers.
const SENT_AT: usize = BUFFERS as usize * BUFFER_BYTES;

/// Header of a packet between a port of this guest and one of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Port of the guest.
    pub guest_port: u32,
    /// Port of the host.
    pub host_port: u32,
    /// Operation, one of [`operation`].
    pub op: u16,
    /// Of SHUTDOWN: 1, the sender receives no more; 2, it sends no more.
    pub flags: u32,
    /// Size of the sender's buffer, bytes.
    pub buf_alloc: u32,
    /// Number of bytes that left that buffer, modulo 2^32.
    pub fwd_cnt: u32,
}

/// Socket device in operation. It is reset when this is dropped.
pub struct Vsock<R: Registers + Clone> {
    _device: ResetFirst<R>,
    rx: Ring,
    rx_bell: Doorbell<R>,
    tx: Ring,
    tx_bell: Doorbell<R>,
    memory: Dma,
    cid: u64,
}

impl<R: Registers + Clone> Vsock<R> {
    /// Resets and initialises the device.
    ///
    /// # Errors
    /// The device lacks what is needed, or behaves wrongly.
    pub fn bring_up(transport: Transport<R>) -> Result<Self, DeviceError> {
        let features = transport.negotiate(EVENT_IDX)?;
        let cid = transport.device_config(|device| {
            u64::from(device.read32(0)) | u64::from(device.read32(4)) << 32
        });
        let (mut rx, rx_bell) = transport.make_queue(0, BUFFERS, NO_VECTOR, features)?;
        let (mut tx, tx_bell) = transport.make_queue(1, 16, NO_VECTOR, features)?;
        rx.disarm();
        tx.disarm();
        let memory = Dma::new(SENT_AT + HEADER_BYTES + PACKET_BYTES);
        transport.start();
        // The ring's descriptors are taken in order, so a buffer's number is its descriptor's.
        for buffer in 0..usize::from(rx.size().min(BUFFERS)) {
            let segment = Segment {
                address: memory.address(buffer * BUFFER_BYTES),
                length: BUFFER_BYTES as u32,
                device_writes: true,
            };
            rx.offer_one(segment);
        }
        if rx.wants_kick() {
            rx_bell.ring();
        }
        Ok(Vsock {
            _device: ResetFirst(transport),
            rx,
            rx_bell,
            tx,
            tx_bell,
            memory,
            cid,
        })
    }

    /// Returns the guest's address.
    pub fn cid(&self) -> u64 {
        self.cid
    }

    /// Returns the next packet that has come, if there is one: its header and its data.
    pub fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let used = self.rx.take_used()?;
        let start = usize::from(used.head) * BUFFER_BYTES;
        let length = (used.written as usize).min(BUFFER_BYTES);
        // SAFETY: the device has returned the buffer.
        let bytes = unsafe { self.memory.bytes(start, length) };
        let packet = parsed(bytes);
        self.rx.offer_again(used.head);
        if self.rx.wants_kick() {
            self.rx_bell.ring();
        }
        packet
    }

    /// Sends a packet, and waits until the device has taken it. `data` is of [`PACKET_BYTES`] at
    /// most.
    ///
    /// # Errors
    /// The device does not take it.
    pub fn send(&mut self, header: &Header, data: &[u8]) -> Result<(), DeviceError> {
        let length = HEADER_BYTES + data.len();
        // SAFETY: the device has no packet now.
        let packet = unsafe { self.memory.bytes_mut(SENT_AT, length) };
        let (head, body) = packet.split_at_mut(HEADER_BYTES);
        head.copy_from_slice(&self::bytes(header, self.cid, data.len()));
        body.copy_from_slice(data);
        let silent = DeviceError::Silent("a packet");
        let segment = Segment {
            address: self.memory.address(SENT_AT),
            length: length as u32,
            device_writes: false,
        };
        self.tx.offer_one(segment).ok_or(silent)?;
        if self.tx.wants_kick() {
            self.tx_bell.ring();
        }
        let mut patience = super::net::patience();
        loop {
            if let Some(used) = self.tx.take_used() {
                self.tx.release(used.head);
                return Ok(());
            }
            if !patience() {
                return Err(silent);
            }
        }
    }
}

fn bytes(header: &Header, cid: u64, data: usize) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&cid.to_le_bytes());
    bytes[8..16].copy_from_slice(&HOST_CID.to_le_bytes());
    bytes[16..20].copy_from_slice(&header.guest_port.to_le_bytes());
    bytes[20..24].copy_from_slice(&header.host_port.to_le_bytes());
    bytes[24..28].copy_from_slice(&(data as u32).to_le_bytes());
    bytes[28..30].copy_from_slice(&STREAM.to_le_bytes());
    bytes[30..32].copy_from_slice(&header.op.to_le_bytes());
    bytes[32..36].copy_from_slice(&header.flags.to_le_bytes());
    bytes[36..40].copy_from_slice(&header.buf_alloc.to_le_bytes());
    bytes[40..].copy_from_slice(&header.fwd_cnt.to_le_bytes());
    bytes
}

/// Returns the header and the data of a packet that the host sent; `None` if it is not whole.
fn parsed(packet: &[u8]) -> Option<(Header, Vec<u8>)> {
    let word = |at: usize| {
        let bytes = packet.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    let header = Header {
        host_port: word(16)?,
        guest_port: word(20)?,
        op: (word(28)? >> 16) as u16,
        flags: word(32)?,
        buf_alloc: word(36)?,
        fwd_cnt: word(40)?,
    };
    let data = packet.get(HEADER_BYTES..HEADER_BYTES + word(24)? as usize)?;
    Some((header, data.to_vec()))
}
