//! What a flow is called in records, and which flows a log has recorded.
use std::io::{self, Read, Seek, SeekFrom};

use hashbrown::HashSet;
use serde::{Deserialize, Serialize};

/// How much of a log's end is searched for ids at adoption, bytes: far more than one turn writes.
const TAIL: u64 = 4 << 20;

/// A translated flow's id.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Id {
    /// What the maps were numbered when they were made.
    pub instance: u32,
    /// The slot's index.
    pub slot: u32,
    /// Its generation.
    pub generation: u32,
}

impl Serialize for Id {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (instance, slot) = (self.instance, self.slot);
        write!(f, "{instance:08x}-{slot}-{}", self.generation)
    }
}

impl Id {
    /// From its text, as in records.
    pub fn parse(text: &str) -> Option<Self> {
        let (instance, rest) = text.split_once('-')?;
        let (slot, generation) = rest.split_once('-')?;
        Some(Self {
            instance: u32::from_str_radix(instance, 16).ok()?,
            slot: slot.parse().ok()?,
            generation: generation.parse().ok()?,
        })
    }
}

/// The ids of the flows that ended in a log's last 4 MiB. A torn first or last line is passed over,
/// and so is what is no flow's end. Lines without an event are flows' ends: there was nothing else
/// once.
pub fn recorded_ids(log: &mut (impl Read + Seek)) -> io::Result<HashSet<Id>> {
    #[derive(Deserialize)]
    struct End {
        event: Option<String>,
        id: String,
    }
    let len = log.seek(SeekFrom::End(0))?;
    log.seek(SeekFrom::Start(len.saturating_sub(TAIL)))?;
    let mut tail = Vec::new();
    log.take(TAIL).read_to_end(&mut tail)?;
    let lines = tail.split(|b| *b == b'\n');
    Ok(lines
        .filter_map(|line| serde_json::from_slice::<End>(line).ok())
        .filter(|end| end.event.as_deref().is_none_or(|event| event == "flow_end"))
        .filter_map(|end| Id::parse(&end.id))
        .collect())
}
