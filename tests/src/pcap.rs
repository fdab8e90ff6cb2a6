//! The classic pcap format (draft-ietf-opsawg-pcap), for a look at a capture with other tools.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

/// Link types of the frames in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkType {
    /// Ethernet frames (LINKTYPE_ETHERNET, 1).
    Ethernet,
    /// Bare IP packets (LINKTYPE_RAW, 101).
    Ip,
}

/// Writes a pcap file with microsecond times. GSO frames are written whole.
#[derive(Debug)]
pub struct PcapWriter {
    file: BufWriter<File>,
}

impl PcapWriter {
    /// Makes the file and writes its header.
    ///
    /// # Errors
    /// The file cannot be made or written.
    pub fn create(path: &Path, link: LinkType) -> io::Result<Self> {
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(&0xa1b2_c3d4_u32.to_le_bytes())?;
        file.write_all(&[2, 0, 4, 0])?; // version 2.4
        file.write_all(&[0; 8])?;
        file.write_all(&262_144u32.to_le_bytes())?;
        let link: u32 = match link {
            LinkType::Ethernet => 1,
            LinkType::Ip => 101,
        };
        file.write_all(&link.to_le_bytes())?;
        Ok(PcapWriter { file })
    }

    /// Adds one frame with the present time.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, frame: &[u8]) -> io::Result<()> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let len = frame.len() as u32;
        for word in [now.as_secs() as u32, now.subsec_micros(), len, len] {
            self.file.write_all(&word.to_le_bytes())?;
        }
        self.file.write_all(frame)
    }

    /// Writes the buffered packets to the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
