//! The card without its threads, one pass at a time. It is for fuzz targets: the same input always
//! has the same effect.
use std::{io, os::fd::OwnedFd, sync::Arc};

use super::{
    IoMethod, NetCounters, NetError,
    config_space::ConfigSpace,
    control::{Session, Shared},
    features::{Features, Offloads},
    frame_io::{self, FrameIo},
    limits::Limits,
    pieces::Translation,
    ring::Ring,
    tap::Tap,
    tried,
    waits::Waits,
    worker::{self, Serving, Worker},
};
use crate::virtio::{Activation, EnabledQueue, NeedsReset, mailbox::mailbox};

/// Card with one queue pair and a control queue.
pub struct Stepped {
    shared: Arc<Shared>,
    worker: Worker,
    serving: Option<Serving>,
    control: Option<Commands>,
}

struct Commands {
    session: Session,
    ring: Ring,
    memory: Translation,
}

impl Stepped {
    /// Returns a card on a TAP's queue or a socket. It reads and writes by readv and writev.
    ///
    /// # Errors
    /// The descriptor is no suitable TAP, or the host refuses a resource.
    pub fn new(tap: OwnedFd, counters: Arc<NetCounters>) -> Result<Stepped, NetError> {
        let tap = Tap::new(vec![tap], false)?;
        let (_, inbox) = mailbox().map_err(tried("make an eventfd"))?;
        let (io, waits) = parts(&tap, inbox.descriptor()).map_err(tried("make an epoll"))?;
        let counted = counters.pairs.first().ok_or(NetError::NoQueues)?;
        Ok(Stepped {
            worker: Worker {
                tap: tap.descriptor(0),
                io,
                waits,
                inbox,
                counters: Arc::clone(counted),
                limits: Limits::default(),
            },
            shared: Arc::new(Shared {
                tap,
                config: Arc::new(ConfigSpace::new([2, 0, 0, 0, 0, 1], 1500, 1)),
                workers: Vec::new(),
                counters,
            }),
            serving: None,
            control: None,
        })
    }

    /// Returns the offered features.
    pub fn features(&self) -> u64 {
        Features::offered(self.shared.tap.offloads(), 1).0
    }

    /// Activates the card with queues 0, 1 and 2.
    ///
    /// # Errors
    /// A queue is missing, or its rings are invalid.
    pub fn activate(&mut self, activation: Activation) -> Result<(), NeedsReset> {
        self.reset();
        let features = Features(activation.features);
        let mut queues = activation.queues.into_iter();
        let mut next = || -> Result<EnabledQueue, NeedsReset> { queues.next().ok_or(NeedsReset) };
        let (rx, tx, control) = (next()?, next()?, next()?);
        let memory = Translation::new(Arc::clone(&activation.memory));
        self.control = Some(Commands {
            session: Session::new(Arc::clone(&self.shared), features, 1),
            ring: Ring::new(&control.queue, features.0, &memory)?,
            memory,
        });
        let start = worker::Start {
            memory: activation.memory,
            features,
            rx,
            tx,
            signals: activation.signals,
            active: true,
            filter: None,
            offloads: self.shared.tap.set(),
        };
        self.serving = Some(self.worker.enter(start, true).map_err(|_| NeedsReset)?);
        Ok(())
    }

    /// Does one pass of the worker. Returns whether there was work.
    ///
    /// # Errors
    /// The driver broke a ring.
    pub fn pass(&mut self) -> Result<bool, NeedsReset> {
        let Some(serving) = &mut self.serving else {
            return Ok(false);
        };
        // Without this the worker would not read before the TAP signals.
        serving.wake();
        let done = self.worker.pass(serving);
        done.map_err(|_| {
            self.worker.leave(&mut self.serving);
            NeedsReset
        })
    }

    /// Carries out the next command. Returns whether there was one.
    ///
    /// # Errors
    /// The driver broke the ring.
    pub fn command(&mut self) -> Result<bool, NeedsReset> {
        let Some(commands) = &mut self.control else {
            return Ok(false);
        };
        let Some(head) = commands.ring.next()? else {
            return Ok(false);
        };
        let Commands {
            session,
            ring,
            memory,
        } = commands;
        session.carry_out(head, ring, memory)?;
        ring.publish();
        if let Some(serving) = &mut self.serving {
            serving.rx.set_filter(session.filter());
        }
        Ok(true)
    }

    /// Turns reading frames for the guest on or off.
    pub fn set_active(&mut self, active: bool) {
        if let Some(serving) = &mut self.serving {
            serving.set_active(active, &self.worker.counters);
        }
    }

    /// Resets the card to its initial state.
    pub fn reset(&mut self) {
        self.worker.leave(&mut self.serving);
        self.control = None;
        let _ = self.shared.tap.set_offloads(Offloads::default());
        self.shared.config.reset();
    }
}

fn parts(tap: &Tap, commands: i32) -> io::Result<(Box<dyn FrameIo>, Waits)> {
    let io = frame_io::new(IoMethod::Vectored, tap.descriptor(0))?;
    Ok((io, Waits::new(commands)?))
}

#[cfg(test)]
#[path = "copies_test.rs"]
mod copies_tests;
#[cfg(test)]
#[path = "stepped_test.rs"]
pub(in crate::virtio) mod tests;
