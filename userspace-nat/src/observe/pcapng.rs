//! Packets as pcapng (draft-ietf-opsawg-pcapng), for tcpdump and Wireshark.
//!
//! A [`Stream`] is a bounded buffer of blocks on their way to a writer that takes as many bytes as
//! it has room for ([`Stream::drain`]): nothing here waits. Packets that find no room are lost and
//! counted, and a block that was begun is written to its end, so that a file never ends within a
//! block.
//!
//! Interfaces stand for links: a VM's own, named as the VM, and the part of the uplink that is the
//! VM's (`NAME uplink`). Frames on the uplink have no Ethernet header here and are given one of
//! zeros: tcpdump reads no file with several link types. Times are to the nanosecond. Frames are
//! whole, so a GSO frame may be longer than any MTU, and a checksum that a device was to fill in is
//! not valid yet.
use std::{
    borrow::Cow,
    io,
    time::{Duration, SystemTime},
};

use slipgate_abi::VmId;

use hashbrown::HashMap;
use pcap_file::{
    DataLink, Endianness,
    pcapng::{
        PcapNgWriter,
        blocks::{
            enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption},
            interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption},
            interface_statistics::{InterfaceStatisticsBlock, InterfaceStatisticsOption},
            section_header::{SectionHeaderBlock, SectionHeaderOption},
        },
    },
};

/// Longest frame, bytes: an IPv4 packet and its Ethernet header.
const SNAP_BYTES: u32 = 65_535 + ETHERNET_LEN as u32;
/// Length of the Ethernet header (MAC addresses and EtherType), bytes.
const ETHERNET_LEN: usize = 14;
/// Length of a packet's block without the packet, bytes, rounded up.
const BLOCK_BYTES: usize = 128;
/// Length of an interface's block, which precedes its first packet, bytes, rounded up.
const INTERFACE_BYTES: usize = 160;

/// Kind of link on which a packet is shown.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LinkKind {
    /// The guest's own link.
    Guest,
    /// The uplink, for one VM.
    Uplink,
}

/// A packet to be written.
#[derive(Clone, Copy, Debug)]
pub struct Shot<'a> {
    /// Id of the VM.
    pub vm: VmId,
    /// Name of the VM.
    pub name: &'a str,
    /// Link on which the packet is shown.
    pub link: LinkKind,
    /// Destination and source MAC.
    pub macs: [[u8; 6]; 2],
    /// EtherType, as in the Ethernet header.
    pub ethertype: u16,
    /// Packet, from the L3 header on.
    pub l3: &'a [u8],
    /// Whether the engine received the packet, rather than sent it.
    pub inbound: bool,
    /// Time of the packet.
    pub at: SystemTime,
    /// Comment that is shown with the packet.
    pub comment: &'a str,
}

/// A stream of blocks, of which a part waits to be written.
pub struct Stream {
    encoder: PcapNgWriter<Vec<u8>>,
    /// Number of bytes at the start of the buffer that were written.
    written: usize,
    most: usize,
    interfaces: HashMap<(VmId, LinkKind), u32>,
    frame: Vec<u8>,
    packets: u64,
    lost: u64,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("waiting", &self.waiting())
            .field("packets", &self.packets)
            .field("lost", &self.lost)
            .finish_non_exhaustive()
    }
}

impl Stream {
    /// Creates an empty stream of which at most `most` bytes wait to be written.
    pub fn new(most: usize) -> Self {
        Self {
            encoder: encoder(Vec::new()),
            written: 0,
            most,
            interfaces: HashMap::new(),
            frame: Vec::new(),
            packets: 0,
            lost: 0,
        }
    }

    /// Adds a packet. Returns `false` when there is no room, and the packet is lost.
    pub fn add(&mut self, shot: &Shot<'_>) -> bool {
        let wanted = shot.l3.len() + ETHERNET_LEN + shot.comment.len() + BLOCK_BYTES;
        if self.waiting() + wanted + INTERFACE_BYTES > self.most {
            self.lost += 1;
            return false;
        }
        let interface_id = self.interface(shot.vm, shot.name, shot.link);
        self.frame.clear();
        self.frame.extend_from_slice(shot.macs.as_flattened());
        self.frame.extend_from_slice(&shot.ethertype.to_be_bytes());
        self.frame.extend_from_slice(shot.l3);
        let mut options = vec![EnhancedPacketOption::Flags(if shot.inbound {
            1
        } else {
            2
        })];
        if !shot.comment.is_empty() {
            options.push(EnhancedPacketOption::Comment(Cow::Borrowed(shot.comment)));
        }
        let block = EnhancedPacketBlock {
            interface_id,
            timestamp: since_epoch(shot.at),
            original_len: self.frame.len() as u32,
            data: Cow::Borrowed(&self.frame),
            options,
        };
        // Memory accepts every write, and the interface exists.
        let added = self.encoder.write_pcapng_block(block).is_ok();
        self.packets += u64::from(added);
        added
    }

    /// Ends the stream with a block that counts the packets taken and lost.
    pub fn end(&mut self, now: SystemTime) {
        if self.interfaces.is_empty() {
            return;
        }
        let block = InterfaceStatisticsBlock {
            interface_id: 0,
            // The library writes the low half first; section 4.6 wants the high half first.
            timestamp: (since_epoch(now).as_nanos() as u64).rotate_left(32),
            options: vec![
                InterfaceStatisticsOption::IsbIfRecv(self.packets + self.lost),
                InterfaceStatisticsOption::IsbIfDrop(self.lost),
            ],
        };
        // As above: memory accepts every write.
        let _ = self.encoder.write_pcapng_block(block);
    }

    /// Hands the waiting bytes to `write`, as many as it takes.
    ///
    /// # Errors
    /// Returns the error of `write`, except for [`io::ErrorKind::WouldBlock`], and `WriteZero` when
    /// it takes nothing. The rest stays waiting.
    pub fn drain(&mut self, mut write: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        let buffer = self.encoder.get_mut();
        let result = loop {
            if self.written == buffer.len() {
                break Ok(());
            }
            match write(&buffer[self.written..]) {
                Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => self.written += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                Err(e) => break Err(e),
            }
        };
        if self.written == buffer.len() {
            buffer.clear();
            self.written = 0;
        } else if self.written > self.most / 2 {
            buffer.drain(..self.written);
            self.written = 0;
        }
        result
    }

    /// Returns the number of bytes that wait to be written.
    pub fn waiting(&self) -> usize {
        self.encoder.get_ref().len() - self.written
    }

    /// Returns the number of packets added, and of packets lost.
    pub fn counts(&self) -> (u64, u64) {
        (self.packets, self.lost)
    }

    /// Describes a link even if it never has a packet: readers refuse a file without any interface.
    pub fn describe(&mut self, vm: VmId, name: &str, link: LinkKind) {
        self.interface(vm, name, link);
    }

    fn interface(&mut self, vm: VmId, name: &str, link: LinkKind) -> u32 {
        let number = self.interfaces.len() as u32;
        let key = (vm, link);
        if let Some(known) = self.interfaces.get(&key) {
            return *known;
        }
        let name = match link {
            LinkKind::Guest => name.to_owned(),
            LinkKind::Uplink => format!("{name} uplink"),
        };
        let block = InterfaceDescriptionBlock {
            linktype: DataLink::ETHERNET,
            snaplen: SNAP_BYTES,
            options: vec![
                InterfaceDescriptionOption::IfName(name.into()),
                // 10^-9 s
                InterfaceDescriptionOption::IfTsResol(9),
            ],
        };
        // As above: memory accepts every write.
        let _ = self.encoder.write_pcapng_block(block);
        self.interfaces.insert(key, number);
        number
    }
}

/// Creates an encoder that appends a section to what is in the buffer.
fn encoder(buffer: Vec<u8>) -> PcapNgWriter<Vec<u8>> {
    let version = concat!("slipgate ", env!("CARGO_PKG_VERSION"));
    let section = SectionHeaderBlock {
        endianness: Endianness::Little,
        options: vec![SectionHeaderOption::UserApplication(version.into())],
        ..SectionHeaderBlock::default()
    };
    PcapNgWriter::with_section_header(buffer, section).expect("memory takes everything")
}

fn since_epoch(at: SystemTime) -> Duration {
    at.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
}

#[cfg(test)]
#[path = "pcapng_test.rs"]
mod tests;
