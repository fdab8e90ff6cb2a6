//! Ids of flows, as records, commands and users have them.
use serde::{Deserialize, Serialize};
use slipgate_abi::{SlotIndex, maps::MAX_OWNERS};

/// Id of a translated flow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TranslatedId {
    /// Instance number that the maps were given when they were created.
    pub instance: u32,
    /// Index of the slot.
    pub slot: SlotIndex,
    /// Generation of the slot.
    pub generation: u32,
}

impl Serialize for TranslatedId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl std::fmt::Display for TranslatedId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (instance, slot) = (self.instance, self.slot);
        write!(f, "{instance:08x}-{slot}-{}", self.generation)
    }
}

impl TranslatedId {
    /// Parses the text form used in records.
    pub fn parse(text: &str) -> Option<Self> {
        let (instance, rest) = text.split_once('-')?;
        let (slot, generation) = rest.split_once('-')?;
        Some(Self {
            instance: u32::from_str_radix(instance, 16).ok()?,
            slot: SlotIndex::new(slot.parse().ok()?),
            generation: generation.parse().ok()?,
        })
    }
}

/// Id of a relayed flow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct RelayedId {
    /// Number of the engine that relays the flow ([`RelayedId::run_of`]).
    pub run: u32,
    /// Number of the flow among that engine's relayed flows.
    pub number: u64,
}

impl std::fmt::Display for RelayedId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "r{:08x}-{}", self.run, self.number)
    }
}

impl RelayedId {
    /// Makes the number of an engine: a random one, with its row of `OWNERS` in the last bits, so
    /// that who passes requests on knows whose flow an id is.
    pub fn run_of(random: u32, owner_row: u32) -> u32 {
        random - random % MAX_OWNERS + owner_row % MAX_OWNERS
    }

    /// Row of `OWNERS` of the engine that relays the flow.
    pub fn owner_row(self) -> u32 {
        self.run % MAX_OWNERS
    }

    /// Parses the text form used in records.
    pub fn parse(text: &str) -> Option<Self> {
        let (run, number) = text.strip_prefix('r')?.split_once('-')?;
        let is_run = run.len() == 8 && run.bytes().all(|b| b.is_ascii_hexdigit());
        let is_number = number.bytes().all(|b| b.is_ascii_digit());
        Some(Self {
            run: u32::from_str_radix(run, 16).ok().filter(|_| is_run)?,
            number: number.parse().ok().filter(|_| is_number)?,
        })
    }
}

impl From<RelayedId> for String {
    fn from(id: RelayedId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for RelayedId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text).ok_or_else(|| format!("{text:?} is no relayed flow's id"))
    }
}

/// Id of any flow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum FlowId {
    /// Flow that the kernel, or the engine in its place, translates.
    Translated(TranslatedId),
    /// Flow that the engine terminates on both sides.
    Relayed(RelayedId),
}

impl FlowId {
    /// Parses the text form used in records.
    pub fn parse(text: &str) -> Option<Self> {
        let relayed = RelayedId::parse(text).map(Self::Relayed);
        relayed.or_else(|| TranslatedId::parse(text).map(Self::Translated))
    }
}

impl std::fmt::Display for FlowId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Translated(id) => id.fmt(f),
            Self::Relayed(id) => id.fmt(f),
        }
    }
}

impl Serialize for FlowId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
#[path = "flow_id_test.rs"]
mod tests;
