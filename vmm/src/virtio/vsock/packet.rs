//! Header of a packet (virtio 1.2, 5.10.6): 44 bytes, little-endian, before the packet's data.

/// Length of the header.
pub(super) const HEADER_BYTES: usize = 44;
/// Address of the host (VMADDR_CID_HOST).
pub(super) const HOST_CID: u64 = 2;
/// Type of a stream socket.
pub(super) const STREAM: u16 = 1;

/// Operations of packets (virtio 5.10.6, `virtio_vsock_op`).
pub(super) mod operation {
    pub(in super::super) const REQUEST: u16 = 1;
    pub(in super::super) const RESPONSE: u16 = 2;
    pub(in super::super) const RST: u16 = 3;
    pub(in super::super) const SHUTDOWN: u16 = 4;
    pub(in super::super) const RW: u16 = 5;
    pub(in super::super) const CREDIT_UPDATE: u16 = 6;
    pub(in super::super) const CREDIT_REQUEST: u16 = 7;
}

/// Flag of SHUTDOWN: the sender receives no more.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// Flag of SHUTDOWN: the sender sends no more.
pub(super) const SHUTDOWN_SEND: u32 = 2;

/// Header of a packet, in host order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) src_cid: u64,
    pub(super) dst_cid: u64,
    pub(super) src_port: u32,
    pub(super) dst_port: u32,
    /// Length of the data behind the header, bytes.
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) op: u16,
    pub(super) flags: u32,
    /// Size of the sender's buffer for the stream, bytes.
    pub(super) buf_alloc: u32,
    /// Number of bytes that left that buffer so far, modulo 2^32.
    pub(super) fwd_cnt: u32,
}

impl Header {
    pub(super) fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Header {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Header {
            src_cid: long(0),
            dst_cid: long(8),
            src_port: word(16),
            dst_port: word(20),
            len: word(24),
            kind: half(28),
            op: half(30),
            flags: word(32),
            buf_alloc: word(36),
            fwd_cnt: word(40),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// Returns the RST that answers this packet.
    pub(super) fn reset(&self) -> Header {
        Header {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: operation::RST,
            ..Header::default()
        }
    }
}
