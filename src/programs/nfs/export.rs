//! What is exported: one file system, to whom, and what its calls come to. NFS and MOUNT meet the store here and nowhere else.
//!
//! ```text
//!  nfs::Request ── execute ──▶ Reply                      all but two: at once
//!                         ├──▶ Read(Reading)              octets from where they lie, then Reading::reply
//!                         └──▶ Write { writing, data, .. } octets in parts, then FileSystem::end_write
//!  mount::Request ── execute_mount ──▶ Reply
//! ```

use super::files::{Caller, FileSystem, Page, Reading, Writing};
use super::types::{FileHandle, FileType, Name, NfsError, Place, Stable};
use super::{Failure, Linked, Node, ReadDone, Reply, Request, Write};
use crate::programs::mount::{self, EXPORTS_MAX, GROUPS_MAX, MOUNTS_MAX, Mount, MountError, Mounted};
use crate::programs::rpc::Data;
use crate::wire::onc_rpc::{AUTH_SYS, Credential, Item};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is exported, as clients name it.
const ROOT: &[u8] = b"/";

/// On what terms a file system is exported.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Rules {
    /// The super-user of a client is nobody here.
    pub root_squash: bool,
    /// Networks that are let in, as EXPORT tells them; none for everybody. Whoever takes a call holds its client against
    /// them.
    pub groups: Vec<String>,
}

/// Who calls, as the door knows it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Client {
    pub address: IpAddr,
    /// The address is of a network that is let in.
    pub is_allowed: bool,
}

/// What became of a call.
#[derive(Debug)]
pub enum Executed {
    /// It is done.
    Reply(Reply),
    /// Octets are to be sent; [`Reading::reply`] is the reply.
    Read(Reading),
    /// Octets are to be taken; [`FileSystem::end_write`] gives the reply.
    Write { writing: Writing, data: Data, stable: Stable },
}

/// See the module. One for all doors.
#[derive(Debug)]
pub struct Export {
    files: Arc<FileSystem>,
    rules: Rules,
    /// What clients say that they have mounted, the latest last; it decides nothing.
    mounts: Mutex<VecDeque<Mount>>,
}

impl Export {
    pub fn new(files: Arc<FileSystem>, rules: Rules) -> Self {
        Self { files, rules, mounts: Mutex::default() }
    }

    pub fn files(&self) -> &Arc<FileSystem> {
        &self.files
    }

    /// Executes what can be at once, and begins the rest.
    pub fn execute(&self, client: &Client, credential: &Credential<'_>, request: &Request<'_>) -> Executed {
        if !client.is_allowed {
            return Executed::Reply(request.refuse(NfsError::Acces));
        }
        let caller = Caller::new(credential, self.rules.root_squash);
        match request {
            Request::Read(read) => match self.files.read(&caller, read) {
                Ok(reading) => Executed::Read(reading),
                Err(failure) => Executed::Reply(Reply::Read(Err(failure))),
            },
            Request::Write(Write { file, offset, stable, data }) => {
                match self.files.begin_write(&caller, file, *offset, data.len()) {
                    Ok(writing) => Executed::Write { writing, data: data.clone(), stable: *stable },
                    Err(failure) => Executed::Reply(Reply::Write(Err(failure))),
                }
            }
            _ => Executed::Reply(self.answer(&caller, request)),
        }
    }

    fn answer(&self, caller: &Caller, request: &Request<'_>) -> Reply {
        let files = &self.files;
        let listing = |page: Page| page.listing;
        match request {
            Request::Null => Reply::Null,
            Request::GetAttr { object } => Reply::GetAttr(files.get_attr(object)),
            Request::SetAttr(arguments) => Reply::SetAttr(files.set_attr(caller, arguments)),
            Request::Lookup(place) => Reply::Lookup(files.lookup(caller, place)),
            Request::Access { object, access } => Reply::Access(files.access(caller, object, *access)),
            Request::ReadLink { symlink } => self.refuse_of(symlink, request, NfsError::Inval),
            Request::Create(arguments) => Reply::Create(files.create(caller, arguments)),
            Request::MkDir(arguments) => Reply::MkDir(files.make_directory(caller, arguments)),
            Request::SymLink(arguments) => self.refuse_of(&arguments.place.dir, request, NfsError::NotSupp),
            Request::MkNod(arguments) => {
                let error = match arguments.what {
                    Node::Other(_) => NfsError::BadType,
                    _ => NfsError::NotSupp,
                };
                self.refuse_of(&arguments.place.dir, request, error)
            }
            Request::Remove(place) => Reply::Remove(files.remove(caller, place)),
            Request::RmDir(place) => Reply::RmDir(files.remove_directory(caller, place)),
            Request::Rename(arguments) => Reply::Rename(files.rename(caller, arguments)),
            Request::Link(arguments) => match files.get_attr(&arguments.file) {
                Err(Failure { error, .. }) => request.refuse(error),
                Ok(attributes) => {
                    let attributes = Linked { file_attributes: Some(attributes), ..Linked::default() };
                    Reply::Link(Err(Failure { error: NfsError::NotSupp, attributes }))
                }
            },
            Request::ReadDir(arguments) => Reply::ReadDir(files.read_directory(caller, arguments).map(listing)),
            Request::ReadDirPlus(arguments) => {
                Reply::ReadDirPlus(files.read_directory_plus(caller, arguments).map(listing))
            }
            Request::FsStat { root } => Reply::FsStat(files.fs_stat(root)),
            Request::FsInfo { root } => Reply::FsInfo(files.fs_info(root)),
            Request::PathConf { object } => Reply::PathConf(files.path_conf(object)),
            Request::Commit(arguments) => Reply::Commit(files.commit(caller, arguments)),
            Request::Read(_) | Request::Write(_) => unreachable!("they are executed in parts"),
        }
    }

    /// What is not there, but for a handle that names nothing: that is told first.
    fn refuse_of(&self, object: &FileHandle, request: &Request<'_>, error: NfsError) -> Reply {
        request.refuse(self.files.get_attr(object).err().map_or(error, |failure| failure.error))
    }

    /// MOUNT. Whoever is not let in may ask what there is, and mounts nothing.
    pub fn execute_mount(&self, client: &Client, request: &mount::Request<'_>) -> mount::Reply {
        let host = client.address.to_canonical().to_string().into_bytes();
        match request {
            mount::Request::Null => mount::Reply::Null,
            mount::Request::Mnt { .. } if !client.is_allowed => mount::Reply::Mnt(Err(MountError::Acces)),
            mount::Request::Mnt { directory } => mount::Reply::Mnt(self.find(directory).map(|handle| {
                self.remember(Mount { host, directory: directory.to_vec() });
                Mounted { handle, flavors: vec![AUTH_SYS] }
            })),
            mount::Request::Dump => mount::Reply::Dump(self.mounts().iter().cloned().collect()),
            mount::Request::Umnt { directory } => {
                self.mounts().retain(|mount| mount.host != host || mount.directory != *directory);
                mount::Reply::Umnt
            }
            mount::Request::UmntAll => {
                self.mounts().retain(|mount| mount.host != host);
                mount::Reply::UmntAll
            }
            mount::Request::Export => {
                const _: () = assert!(EXPORTS_MAX >= 1);
                let groups = self.rules.groups.iter().take(GROUPS_MAX);
                let groups = groups.map(|group| group.clone().into_bytes()).collect();
                mount::Reply::Export(vec![mount::Export { directory: ROOT.to_vec(), groups }])
            }
        }
    }

    /// The handle of a directory, by its path.
    fn find(&self, path: &[u8]) -> Result<FileHandle, MountError> {
        if path.first() != Some(&b'/') {
            return Err(MountError::NoEnt);
        }
        // Permissions are asked for by the calls that follow.
        let caller = Caller { uid: 0, gid: 0, gids: Vec::new() };
        let names = path.split(|octet| *octet == b'/').filter(|name| !name.is_empty());
        let mut dir = self.files.root();
        for name in names {
            let found = self.files.lookup(&caller, &Place { dir, name: Name(name) });
            dir = found.map_err(|failure| mount_error(failure.error))?.object;
        }
        match self.files.get_attr(&dir) {
            Ok(attributes) if attributes.kind == FileType::Directory => Ok(dir),
            Ok(_) => Err(MountError::NotDir),
            Err(failure) => Err(mount_error(failure.error)),
        }
    }

    fn remember(&self, mount: Mount) {
        let mut mounts = self.mounts();
        mounts.retain(|known| *known != mount);
        mounts.push_back(mount);
        if mounts.len() > MOUNTS_MAX {
            mounts.pop_front();
        }
    }

    fn mounts(&self) -> MutexGuard<'_, VecDeque<Mount>> {
        self.mounts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const fn mount_error(error: NfsError) -> MountError {
    match error {
        NfsError::NoEnt | NfsError::Stale => MountError::NoEnt,
        NfsError::NotDir => MountError::NotDir,
        NfsError::NameTooLong => MountError::NameTooLong,
        NfsError::Acces | NfsError::Perm => MountError::Acces,
        _ => MountError::Io,
    }
}

impl Reading {
    /// The reply whose data is item `token`.
    pub fn reply(&self, token: u32) -> Reply {
        let data = Item { token, len: self.len };
        Reply::Read(Ok(ReadDone { file_attributes: Some(self.file_attributes), eof: self.eof, data }))
    }

    /// The reply when octets could not be read from disk.
    pub fn lost(&self) -> Reply {
        Reply::Read(Err(Failure { error: NfsError::Io, attributes: Some(self.file_attributes) }))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::programs::nfs::files::Settings;
    use crate::programs::nfs::{
        Accessible, CreateHow, LinkTo, MakeDirectory, MakeNode, MakeSymbolicLink, SetAttributes,
    };
    use crate::programs::nfs::{Create, WriteDone};
    use crate::store::{Sizes, Store};
    use crate::wire::onc_rpc::AuthSys;

    pub(crate) fn export(rules: Rules) -> Export {
        let sizes = Sizes { value_bytes_max: 1 << 20, pinned_share: 0.5, ..Sizes::small() };
        let store = Store::with_files(sizes).unwrap();
        Export::new(Arc::new(FileSystem::new(store, Settings { fsid: 7, boot: 9, uid: 1, gid: 2 })), rules)
    }

    fn client(last: u8, is_allowed: bool) -> Client {
        Client { address: IpAddr::from([192, 0, 2, last]), is_allowed }
    }

    const ROOT_USER: Credential<'static> =
        Credential::Sys(AuthSys { stamp: 0, machine_name: b"host", uid: 0, gid: 0, gids: Vec::new() });

    fn ask(export: &Export, request: &Request<'_>) -> Reply {
        match export.execute(&client(1, true), &ROOT_USER, request) {
            Executed::Reply(reply) => reply,
            other => panic!("{other:?}"),
        }
    }

    fn mount(export: &Export, path: &[u8]) -> Result<FileHandle, MountError> {
        match export.execute_mount(&client(1, true), &mount::Request::Mnt { directory: path }) {
            mount::Reply::Mnt(result) => result.map(|mounted| mounted.handle),
            other => panic!("{other:?}"),
        }
    }

    fn place(dir: FileHandle, name: &[u8]) -> Place<'_> {
        Place { dir, name: Name(name) }
    }

    /// With a file of five octets, `/dir/file`.
    fn filled() -> (Export, FileHandle) {
        let export = export(Rules::default());
        let root = export.files().root();
        let attributes = SetAttributes::default();
        let made = ask(&export, &Request::MkDir(MakeDirectory { place: place(root, b"dir"), attributes }));
        let Reply::MkDir(Ok(made)) = made else { panic!("{made:?}") };
        let dir = made.obj.unwrap();
        let how = CreateHow::Guarded(attributes);
        let made = ask(&export, &Request::Create(Create { place: place(dir, b"file"), how }));
        let Reply::Create(Ok(made)) = made else { panic!("{made:?}") };
        let file = made.obj.unwrap();
        let data = Data::Inline(0..5);
        let write = Request::Write(Write { file, offset: 0, stable: Stable::FileSync, data: data.clone() });
        let begun = export.execute(&client(1, true), &ROOT_USER, &write);
        let Executed::Write { mut writing, data: found, stable } = begun else { panic!("{begun:?}") };
        assert_eq!(found, data);
        export.files().write(&mut writing, b"hello");
        let done = export.files().end_write(writing, 5, stable);
        assert!(matches!(done, Ok(WriteDone { count: 5, committed: Stable::FileSync, .. })), "{done:?}");
        (export, file)
    }

    #[test]
    fn directories_are_mounted_by_their_paths_and_nothing_else_is() {
        let (export, _) = filled();
        let root = export.files().root();
        for path in [&b"/"[..], b"//", b"///"] {
            assert_eq!(mount(&export, path), Ok(root));
        }
        let dir = mount(&export, b"/dir").unwrap();
        assert_ne!(dir, root);
        assert_eq!(mount(&export, b"//dir/"), Ok(dir));
        assert_eq!(mount(&export, b"/dir/../dir/."), Ok(dir));
        for (path, error) in [
            (&b""[..], MountError::NoEnt),
            (b"dir", MountError::NoEnt),
            (b"/none", MountError::NoEnt),
            (b"/dir/file", MountError::NotDir),
            (b"/dir/file/below", MountError::NotDir),
            (&[&b"/"[..], &[b'x'; 256]].concat(), MountError::NameTooLong),
        ] {
            assert_eq!(mount(&export, path), Err(error), "{}", path.escape_ascii());
        }
    }

    #[test]
    fn what_is_mounted_is_told_once_for_each_and_bounded() {
        let (export, _) = filled();
        let dump = |export: &Export| match export.execute_mount(&client(9, false), &mount::Request::Dump) {
            mount::Reply::Dump(mounts) => mounts,
            other => panic!("{other:?}"),
        };
        mount(&export, b"/").unwrap();
        mount(&export, b"/dir").unwrap();
        mount(&export, b"/").unwrap();
        assert!(mount(&export, b"/none").is_err());
        let expected = |path: &[u8]| Mount { host: b"192.0.2.1".to_vec(), directory: path.to_vec() };
        assert_eq!(dump(&export), [expected(b"/dir"), expected(b"/")]);
        export.execute_mount(&client(2, true), &mount::Request::UmntAll);
        export.execute_mount(&client(2, true), &mount::Request::Umnt { directory: b"/" });
        assert_eq!(dump(&export).len(), 2, "others' stay");
        export.execute_mount(&client(1, true), &mount::Request::Umnt { directory: b"/dir" });
        assert_eq!(dump(&export), [expected(b"/")]);
        for last in 2..=255 {
            export.execute_mount(&client(last, true), &mount::Request::Mnt { directory: b"/" });
            export.execute_mount(&client(last, true), &mount::Request::Mnt { directory: b"/dir" });
        }
        assert_eq!(dump(&export).len(), MOUNTS_MAX);
    }

    #[test]
    fn whoever_is_not_let_in_may_ask_what_there_is_and_nothing_else() {
        let (export, file) = filled();
        let stranger = client(7, false);
        let mounted = export.execute_mount(&stranger, &mount::Request::Mnt { directory: b"/" });
        assert_eq!(mounted, mount::Reply::Mnt(Err(MountError::Acces)));
        for request in [
            Request::GetAttr { object: file },
            Request::Read(super::super::Read { file, offset: 0, count: 5 }),
            Request::Write(Write { file, offset: 0, stable: Stable::Unstable, data: Data::Inline(0..5) }),
            Request::Remove(place(export.files().root(), b"dir")),
        ] {
            let executed = export.execute(&stranger, &ROOT_USER, &request);
            assert!(matches!(&executed, Executed::Reply(reply) if *reply == request.refuse(NfsError::Acces)));
        }
        let null = export.execute(&stranger, &ROOT_USER, &Request::Null);
        assert!(matches!(null, Executed::Reply(Reply::Null)));
        let rules = Rules { groups: vec!["192.0.2.0/24".to_owned()], root_squash: false };
        let listed = Export::new(export.files().clone(), rules).execute_mount(&stranger, &mount::Request::Export);
        let groups = vec![b"192.0.2.0/24".to_vec()];
        assert_eq!(listed, mount::Reply::Export(vec![mount::Export { directory: b"/".to_vec(), groups }]));
    }

    #[test]
    fn links_and_devices_are_not_supported_and_handles_of_nothing_are_told_first() {
        let (export, file) = filled();
        let root = export.files().root();
        let nothing = FileHandle::new(&[5; 28]).unwrap();
        let attributes = SetAttributes::default();
        let symlink = |dir| {
            Request::SymLink(MakeSymbolicLink { place: place(dir, b"new"), attributes, path: Data::Inline(0..1) })
        };
        let node = |dir, what| Request::MkNod(MakeNode { place: place(dir, b"new"), what });
        let link = |file| Request::Link(LinkTo { file, link: place(root, b"new") });
        let fifo = Node::Fifo(attributes);
        for (request, error) in [
            (symlink(root), NfsError::NotSupp),
            (symlink(nothing), NfsError::BadHandle),
            (node(root, fifo), NfsError::NotSupp),
            (node(root, Node::Other(FileType::Directory)), NfsError::BadType),
            (node(nothing, fifo), NfsError::BadHandle),
            (Request::ReadLink { symlink: file }, NfsError::Inval),
            (Request::ReadLink { symlink: nothing }, NfsError::BadHandle),
            (link(nothing), NfsError::BadHandle),
        ] {
            assert_eq!(ask(&export, &request), request.refuse(error), "{request:?}");
        }
        let linked = ask(&export, &link(file));
        let Reply::Link(Err(Failure { error: NfsError::NotSupp, attributes })) = linked else { panic!("{linked:?}") };
        assert_eq!(attributes.file_attributes.map(|attributes| attributes.size), Some(5));
    }

    #[test]
    fn a_read_tells_what_there_is_and_its_loss() {
        let (export, file) = filled();
        let read = Request::Read(super::super::Read { file, offset: 1, count: 100 });
        let begun = export.execute(&client(1, true), &ROOT_USER, &read);
        let Executed::Read(reading) = begun else { panic!("{begun:?}") };
        let Reply::Read(Ok(done)) = reading.reply(3) else { panic!("it is read") };
        assert_eq!((done.data, done.eof), (Item { token: 3, len: 4 }, true));
        let Reply::Read(Err(failure)) = reading.lost() else { panic!("it is lost") };
        assert_eq!((failure.error, failure.attributes.is_some()), (NfsError::Io, true));
    }

    #[test]
    fn the_super_user_is_nobody_where_that_is_the_rule() {
        let (export, file) = filled();
        let squashed = Export::new(export.files().clone(), Rules { root_squash: true, ..Rules::default() });
        let may = |export: &Export| match ask(export, &Request::Access { object: file, access: 0x3f }) {
            Reply::Access(Ok(Accessible { access, .. })) => access,
            other => panic!("{other:?}"),
        };
        // The super-user made it and gave no mode, so that it is 0644.
        assert_eq!((may(&export), may(&squashed)), (0x0d, 0x01));
    }
}
