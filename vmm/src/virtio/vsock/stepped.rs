//! The vsock device without its thread, one turn at a time. It is for fuzz targets: the same input
//! always has the same effect.
use std::{
    collections::BTreeMap,
    io,
    os::fd::RawFd,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use vmm_sys_util::epoll::{Epoll, EpollEvent};

use super::{
    VsockConfig, VsockCounters,
    requests::Requests,
    switch::Switch,
    worker::{Queues, SIGNALS, Stopped, Worker, expire},
};
use crate::{
    GuestMemory,
    virtio::{EnabledQueue, NeedsReset, Signals, mailbox::mailbox, pieces::Translation},
};

/// Time for an answer: no request expires but by [`Serving::expire`].
const ANSWERED_WITHIN: Duration = Duration::from_secs(24 * 60 * 60);

impl From<Stopped> for NeedsReset {
    fn from(_: Stopped) -> NeedsReset {
        NeedsReset
    }
}

/// What there is at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Programs that did not say yet where to.
    pub greetings: usize,
    /// Requests of the guest without an answer.
    pub pending: usize,
    /// Connections, also those that the guest was not told of.
    pub connections: usize,
    /// RSTs that wait for the driver's buffers.
    pub resets: usize,
    /// Connections that are open at both ends, by the ports of the host's end and the guest's. Of
    /// each the number of bytes that are held for the host's program.
    pub open: BTreeMap<(u32, u32), usize>,
}

/// Device that the caller serves.
pub struct Stepped {
    worker: Worker,
    requests: Rc<Requests>,
}

impl Stepped {
    /// Returns a device without a driver.
    ///
    /// # Errors
    /// The host refuses a descriptor.
    pub fn new(config: VsockConfig, counters: Arc<VsockCounters>) -> io::Result<Stepped> {
        let (_, inbox) = mailbox()?;
        Ok(Stepped {
            requests: Rc::new(Requests::new(config.connector, ANSWERED_WITHIN)),
            worker: Worker {
                cid: config.cid,
                inbox,
                listener: config.listener,
                connector: None,
                answered_within: ANSWERED_WITHIN,
                epoll: Epoll::new()?,
                counters,
            },
        })
    }

    /// Begins to serve a driver's queues. All connections end with the result. `restored`: the next
    /// port of the host's ends, in a device that was saved.
    ///
    /// # Errors
    /// A queue is missing or its rings are invalid, or the host refuses to watch a descriptor.
    pub fn serve<'a>(
        &'a self,
        memory: Arc<GuestMemory>,
        features: u64,
        queues: &'a [EnabledQueue],
        signals: &'a dyn Signals,
        restored: Option<u32>,
    ) -> Result<Serving<'a>, NeedsReset> {
        let mut switch = self.worker.switch(&self.requests);
        let mut served = Queues::new(queues, features, Translation::new(memory), signals)
            .map_err(Stopped::from)?;
        if let Some(next_port) = restored {
            switch.begin_at(next_port);
            served.tell_of_reset().map_err(Stopped::from)?;
        }
        let watched = self.worker.descriptors(queues, &self.requests);
        self.worker.watch(&watched)?;
        switch.accept(&self.worker.listener);
        Ok(Serving {
            device: self,
            queues: served,
            switch,
            watched,
            events: [EpollEvent::default(); SIGNALS],
        })
    }
}

/// A driver that is served.
pub struct Serving<'a> {
    device: &'a Stepped,
    queues: Queues<'a>,
    switch: Switch<'a>,
    watched: Vec<(RawFd, u64)>,
    events: [EpollEvent; SIGNALS],
}

impl Serving<'_> {
    /// Moves packets between the queues and the connections. Returns whether there is more to do at
    /// once.
    ///
    /// # Errors
    /// The driver broke a ring. It is not to be served any more.
    pub fn exchange(&mut self) -> Result<bool, NeedsReset> {
        Ok(self.queues.exchange(&mut self.switch)?)
    }

    /// Takes the signals that are there: of sockets, of programs that connect, of answers. Returns
    /// their number.
    ///
    /// # Errors
    /// The host refuses to wait.
    pub fn take_signals(&mut self) -> Result<usize, NeedsReset> {
        let worker = &self.device.worker;
        Ok(worker.take_signals(&mut self.switch, 0, &mut self.events)?)
    }

    /// Has all requests of the guest without an answer waited too long.
    pub fn expire(&mut self) {
        expire(&mut self.switch, || Instant::now() + 2 * ANSWERED_WITHIN);
    }

    /// Counts what there is.
    ///
    /// # Panics
    /// It does not fit together.
    pub fn census(&self) -> Census {
        self.switch.census()
    }
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        self.device.worker.unwatch(&self.watched);
    }
}
