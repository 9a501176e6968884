//! Who calls, and what mode bits let him do.

use crate::store::files::{Metadata, Owner};
use crate::wire::onc_rpc::Credential;

/// Bits of a mode, for one of owner, group and others.
pub(super) const READ: u32 = 4;
pub(super) const WRITE: u32 = 2;
pub(super) const EXECUTE: u32 = 1;
/// Entries of such a directory are their owner's and the directory's owner's to remove.
const STICKY: u32 = 0o1000;
/// New entries of such a directory have its group; such a file acts as its group when it is executed.
const SET_GROUP: u32 = 0o2000;
/// A file that acts as its owner when it is executed.
const SET_USER: u32 = 0o4000;
/// Who is nobody else: the customary number.
pub const NOBODY: u32 = 65534;

/// Who calls, as far as his host says.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    pub gids: Vec<u32>,
}

impl Caller {
    /// Nobody where the credential names none; with `root_squash` where it names the super-user, too.
    pub fn new(credential: &Credential<'_>, root_squash: bool) -> Self {
        let nobody = Self { uid: NOBODY, gid: NOBODY, gids: Vec::new() };
        let Credential::Sys(sys) = credential else { return nobody };
        if root_squash && sys.uid == 0 {
            return nobody;
        }
        // The super-user's group gives what the super-user may not have.
        let squash = |gid: u32| if root_squash && gid == 0 { NOBODY } else { gid };
        Self { uid: sys.uid, gid: squash(sys.gid), gids: sys.gids.iter().map(|gid| squash(*gid)).collect() }
    }

    pub(super) fn is_root(&self) -> bool {
        self.uid == 0
    }

    pub(super) fn owns(&self, owner: Owner) -> bool {
        self.is_root() || self.uid == owner.uid
    }

    pub(super) fn is_in(&self, gid: u32) -> bool {
        self.gid == gid || self.gids.contains(&gid)
    }

    /// Whether the mode gives all of `bits`.
    pub(super) fn may(&self, owner: Owner, bits: u32, is_directory: bool) -> bool {
        if self.is_root() {
            // A file that is executable for nobody is for the super-user neither.
            return bits & EXECUTE == 0 || is_directory || owner.mode & 0o111 != 0;
        }
        let shift = match owner {
            _ if self.uid == owner.uid => 6,
            _ if self.is_in(owner.gid) => 3,
            _ => 0,
        };
        owner.mode >> shift & bits == bits
    }

    /// Reading a file. Its owner may whatever the mode, as one who has opened it could (RFC 1813 §4.4), and who may execute it
    /// must read it.
    pub(super) fn may_read(&self, owner: Owner) -> bool {
        self.owns(owner) || self.may(owner, READ, false) || self.may(owner, EXECUTE, false)
    }

    /// Writing a file; see [`Caller::may_read`].
    pub(super) fn may_write(&self, owner: Owner) -> bool {
        self.owns(owner) || self.may(owner, WRITE, false)
    }

    /// Taking an entry out of a directory.
    pub(super) fn may_remove(&self, directory: Owner, entry: Owner) -> bool {
        let is_free = directory.mode & STICKY == 0 || self.owns(directory) || self.owns(entry);
        self.may(directory, WRITE | EXECUTE, true) && is_free
    }

    /// Whether what he makes may act as a group: as one that he is in.
    pub(super) fn may_set_group(&self, gid: u32) -> bool {
        self.is_root() || self.is_in(gid)
    }

    /// The content of a file changes: it does not go on acting as its owner, or as the group that executes it.
    pub(super) fn drop_rights(is_root: bool, metadata: &mut Metadata) {
        if let Some(owner) = metadata.owner.as_mut().filter(|_| !is_root) {
            let group = if owner.mode & (EXECUTE << 3) != 0 { SET_GROUP } else { 0 };
            owner.mode &= !(SET_USER | group);
        }
    }

    /// What a new entry of `directory` begins with.
    pub(super) fn begin(&self, directory: Owner, mode: u32, is_directory: bool, now_ns: u64) -> Metadata {
        let inherits = directory.mode & SET_GROUP != 0;
        let gid = if inherits { directory.gid } else { self.gid };
        let mode = match is_directory {
            true if inherits => mode | SET_GROUP,
            false if !self.may_set_group(gid) => mode & !SET_GROUP,
            _ => mode,
        };
        Metadata::new(Some(Owner { mode: mode & 0o7777, uid: self.uid, gid }), now_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::onc_rpc::AuthSys;

    fn caller(uid: u32, gid: u32, gids: &[u32]) -> Caller {
        Caller { uid, gid, gids: gids.to_vec() }
    }

    #[test]
    fn the_first_class_that_fits_decides_even_if_another_gives_more() {
        let owner = |mode| Owner { mode, uid: 10, gid: 20 };
        let cases = [
            (caller(10, 20, &[]), 0o077, READ, false),
            (caller(10, 9, &[]), 0o700, READ | WRITE | EXECUTE, true),
            (caller(11, 20, &[]), 0o707, READ, false),
            (caller(11, 9, &[3, 20]), 0o050, READ | EXECUTE, true),
            (caller(11, 9, &[3, 20]), 0o050, WRITE, false),
            (caller(11, 9, &[]), 0o770, READ, false),
            (caller(11, 9, &[]), 0o004, READ, true),
            (caller(0, 0, &[]), 0o000, READ | WRITE, true),
        ];
        for (caller, mode, bits, may) in cases {
            assert_eq!(caller.may(owner(mode), bits, false), may, "{caller:?} {mode:o} {bits}");
        }
        let root = caller(0, 0, &[]);
        assert!(!root.may(owner(0o644), EXECUTE, false) && root.may(owner(0o644), EXECUTE, true));
        assert!(root.may(owner(0o100), EXECUTE, false));
        assert!(caller(10, 20, &[]).may_write(owner(0o444)), "he may have opened it when he made it");
        assert!(!caller(11, 20, &[]).may_write(owner(0o444)));
        assert!(caller(11, 9, &[]).may_read(owner(0o711)), "whoever executes it reads it");
    }

    #[test]
    fn the_super_user_is_squashed_where_that_is_asked_for_and_who_names_nobody_is_nobody() {
        let sys = |uid| Credential::Sys(AuthSys { stamp: 0, machine_name: b"", uid, gid: 0, gids: vec![0, 7] });
        let nobody = caller(NOBODY, NOBODY, &[]);
        assert_eq!(Caller::new(&sys(0), false), caller(0, 0, &[0, 7]));
        assert_eq!(Caller::new(&sys(0), true), nobody);
        assert_eq!(Caller::new(&sys(5), true), caller(5, NOBODY, &[NOBODY, 7]));
        assert_eq!(Caller::new(&Credential::None, false), nobody);
        assert_eq!(Caller::new(&Credential::Other { flavor: 6 }, false), nobody);
    }

    #[test]
    fn entries_of_a_sticky_directory_are_their_owners() {
        let directory = |mode| Owner { mode, uid: 1, gid: 1 };
        let entry = Owner { mode: 0o666, uid: 2, gid: 2 };
        assert!(caller(3, 3, &[]).may_remove(directory(0o777), entry));
        assert!(!caller(3, 3, &[]).may_remove(directory(0o1777), entry));
        for uid in [0, 1, 2] {
            assert!(caller(uid, 3, &[]).may_remove(directory(0o1777), entry));
        }
        assert!(!caller(2, 3, &[]).may_remove(directory(0o755), entry));
        let made = caller(3, 4, &[]).begin(directory(0o2777), 0o755, true, 9);
        assert_eq!(made.owner, Some(Owner { mode: 0o2755, uid: 3, gid: 1 }));
    }
}
