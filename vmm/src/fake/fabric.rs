//! Interrupt lines and doorbells without a hypervisor.
use std::{
    collections::BTreeMap,
    io,
    sync::{Mutex, MutexGuard, PoisonError},
};

use vmm_sys_util::eventfd::EventFd;

use crate::interrupt::{Doorbells, MsiFabric, MsiMessage};

/// Records lines, routes and doorbells, and reports signals. It is as strict as KVM: it refuses an
/// address that is taken, and a message outside the local APICs' window.
#[derive(Default)]
pub struct Fabric(Mutex<State>);

#[derive(Default)]
struct State {
    next: u32,
    lines: BTreeMap<u32, Line>,
    bells: BTreeMap<u64, EventFd>,
    routes: u64,
    /// Whether it refuses to hold lines, and to go on with those that are held.
    refuses_holds: bool,
}

struct Line {
    signal: EventFd,
    message: Option<MsiMessage>,
    is_held: bool,
}

impl Fabric {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the interrupts on the `vector`th connected line since the last call, and the line's
    /// message. Signals that came together count each.
    pub fn take(&self, vector: u16) -> (u64, Option<MsiMessage>) {
        let state = self.lock();
        let line = &state.lines[&vector.into()];
        match line.is_held {
            true => (0, line.message),
            false => (line.signal.read().unwrap_or(0), line.message),
        }
    }

    /// Has it refuse from now on to hold lines, and to go on with those that are held.
    pub fn refuse_holds(&self) {
        self.lock().refuses_holds = true;
    }

    /// Returns the number of connected lines.
    pub fn lines(&self) -> usize {
        self.lock().lines.len()
    }

    /// Returns the number of calls that set a line's message.
    pub fn routes(&self) -> u64 {
        self.lock().routes
    }

    /// Returns the addresses of the doorbells.
    pub fn bells(&self) -> Vec<u64> {
        self.lock().bells.keys().copied().collect()
    }

    /// Signals the doorbell at `address`, as a guest's write does before any exit. Returns false if
    /// there is none.
    pub fn ring(&self, address: u64) -> bool {
        let state = self.lock();
        let bell = state.bells.get(&address);
        bell.is_some_and(|bell| bell.write(1).is_ok())
    }
}

impl MsiFabric for Fabric {
    fn connect(&self, signal: &EventFd) -> io::Result<u32> {
        let mut state = self.lock();
        let gsi = state.next;
        state.next += 1;
        let signal = signal.try_clone()?;
        state.lines.insert(
            gsi,
            Line {
                signal,
                message: None,
                is_held: false,
            },
        );
        Ok(gsi)
    }

    fn route(&self, gsi: u32, message: MsiMessage) -> io::Result<()> {
        if message.address >> 20 != 0xfee {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut state = self.lock();
        state.routes += 1;
        let line = state
            .lines
            .get_mut(&gsi)
            .expect("a line that was connected");
        line.message = Some(message);
        Ok(())
    }

    fn set_held(&self, gsi: u32, _signal: &EventFd, is_held: bool) -> io::Result<()> {
        let mut state = self.lock();
        if state.refuses_holds {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let line = state
            .lines
            .get_mut(&gsi)
            .expect("a line that was connected");
        assert_ne!(line.is_held, is_held, "line {gsi} changes");
        line.is_held = is_held;
        Ok(())
    }

    fn disconnect(&self, gsi: u32, _signal: &EventFd) {
        let line = self.lock().lines.remove(&gsi);
        assert!(line.is_some(), "line {gsi} was connected");
    }
}

impl Doorbells for Fabric {
    fn connect(&self, address: u64, bell: &EventFd) -> io::Result<()> {
        let mut state = self.lock();
        if state.bells.contains_key(&address) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        state.bells.insert(address, bell.try_clone()?);
        Ok(())
    }

    fn disconnect(&self, address: u64, _bell: &EventFd) {
        let bell = self.lock().bells.remove(&address);
        assert!(bell.is_some(), "a bell at {address:#x} was connected");
    }
}
