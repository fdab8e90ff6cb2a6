//! Sets of recorded events.
pub use slipgate_model::FlowLogEvent as Event;

/// A set of events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Events(u8);

impl Events {
    /// The set of all events.
    pub const ALL: Self = Self(0b1111);

    /// Creates a set of the given events.
    pub const fn of(events: &[Event]) -> Self {
        let mut set = 0;
        let mut at = 0;
        while at < events.len() {
            set |= 1 << events[at] as u8;
            at += 1;
        }
        Self(set)
    }

    /// Whether the set contains an event.
    pub const fn has(self, event: Event) -> bool {
        self.0 & 1 << event as u8 != 0
    }
}

impl FromIterator<Event> for Events {
    fn from_iter<I: IntoIterator<Item = Event>>(events: I) -> Self {
        Self(
            events
                .into_iter()
                .fold(0, |set, event| set | 1 << event as u8),
        )
    }
}
