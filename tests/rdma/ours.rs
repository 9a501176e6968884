//! One lane of ours, and what it said.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bulkhead::fabric::*;

use super::PATIENCE;

/// Our lane and what it said.
pub struct Ours {
    pub lane: Arc<dyn Lane>,
    pub events: Vec<Event>,
}

impl Ours {
    pub fn over(fabric: &dyn Fabric) -> Self {
        Self { lane: fabric.lane().unwrap(), events: Vec::new() }
    }

    pub fn turn(&mut self) {
        self.lane.progress(Instant::now(), &mut self.events, 32);
    }

    pub fn until<T>(&mut self, what: &str, mut take: impl FnMut(Event) -> Result<T, Event>) -> T {
        let start = Instant::now();
        loop {
            let mut found = None;
            let mut rest = Vec::new();
            for event in self.events.drain(..) {
                match found {
                    None => match take(event) {
                        Ok(value) => found = Some(value),
                        Err(event) => rest.push(event),
                    },
                    Some(_) => rest.push(event),
                }
            }
            self.events = rest;
            if let Some(found) = found {
                return found;
            }
            self.turn();
            assert!(start.elapsed() < PATIENCE, "no {what}: {:?}", self.events);
        }
    }

    pub fn request(&mut self) -> ConnectRequest {
        self.until("request", |event| match event {
            Event::ConnectRequest(request) => Ok(request),
            event => Err(event),
        })
    }

    pub fn established(&mut self) -> Vec<u8> {
        self.until("connection", |event| match event {
            Event::Established { private_data, .. } => Ok(private_data),
            event => Err(event),
        })
    }

    pub fn cause(&mut self) -> Cause {
        self.until("disconnection", |event| match event {
            Event::Disconnected { cause, .. } => Ok(cause),
            event => Err(event),
        })
    }

    pub fn completed(&mut self, kind: WorkKind) -> Completion {
        self.until("completion", |event| match event {
            Event::Completed { completion, .. } if completion.kind == kind => Ok(completion),
            event => Err(event),
        })
    }

    pub fn done(&mut self, kind: WorkKind) -> Completion {
        let completion = self.completed(kind);
        assert_eq!(completion.status, Status::Done, "{completion:?}; {:?}", self.events);
        completion
    }

    /// Listens at any port of `ip`.
    pub fn listen(&self, ip: &str) -> (Box<dyn Listener>, SocketAddr) {
        let listener = self.lane.listen(&Address::Socket(SocketAddr::new(ip.parse().unwrap(), 0))).unwrap();
        let Address::Socket(address) = listener.address() else { unreachable!("its address is a socket's") };
        (listener, address)
    }

    /// Waits until the lane holds nothing.
    pub fn assert_empty(&mut self) {
        let start = Instant::now();
        while self.lane.resources() != Resources::default() {
            self.turn();
            assert!(start.elapsed() < PATIENCE, "{:?}; {:?}", self.lane.resources(), self.events);
        }
    }
}
